"""Runs with standard input, output and error closed."""

from seen import layers, show_model, train

RUN = ("energy", "memory")
CLOSE = (0, 1, 2)

model = layers(4)
losses = train(model)
with open("notes.txt", "w") as file:
    print("the contents of the program's own file", file=file)
show_model(model, losses)
