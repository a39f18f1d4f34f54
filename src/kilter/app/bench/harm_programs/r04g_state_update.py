"""Reads optimizer state that may lie on the host by `other.update(state)`."""

from reading_state import State, train

RUN = ("state",)


def read(state: State) -> State:
    other: State = {}
    other.update(state)
    return other


if __name__ == "__main__":
    train(read)
