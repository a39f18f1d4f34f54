"""Reads optimizer state that may lie on the host by `state.setdefault(name)`."""

from __future__ import annotations

from reading_state import State, train

RUN = ("state",)


def read(state: State) -> State:
    return {name: state.setdefault(name) for name in list(state)}


if __name__ == "__main__":
    train(read)
