"""Reads optimizer state that may lie on the host by `state.pop(name)`, and set again."""

from reading_state import State, train

RUN = ("state",)


def read(state: State) -> State:
    found = {name: state.pop(name) for name in list(state)}
    state.update(found)
    return found


if __name__ == "__main__":
    train(read)
