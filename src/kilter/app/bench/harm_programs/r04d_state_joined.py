"""Reads optimizer state that may lie on the host by `state | {}`."""

from reading_state import train

RUN = ("state",)

if __name__ == "__main__":
    train(lambda state: state | {})
