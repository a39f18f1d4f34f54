"""Reads optimizer state that may lie on the host by `state.setdefault(name)`."""

from reading_state import train

RUN = ("state",)

if __name__ == "__main__":
    train(lambda state: {name: state.setdefault(name) for name in list(state)})
