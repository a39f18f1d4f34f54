"""Runs with standard error closed (`2>&-`)."""

from seen import layers, show_model, train

RUN = ("energy", "memory", "govern")
CLOSE = (2,)

model = layers(4)
losses = train(model)
print(f"last loss {losses[-1].item():.6f}", flush=True)
with open("notes.txt", "w") as file:
    print("the contents of the program's own file", file=file)
show_model(model, losses)
