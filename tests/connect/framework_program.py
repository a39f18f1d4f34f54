"""`framework_program.py FRAMEWORK fake|real OUT`: trainings of one framework under its callback,
one after the other in this process. Prints what came of each as one JSON object."""

import json
import sys
from pathlib import Path

import frameworks
import torch

import kilter
from kilter.session import options as session_options

NAME, KIND, OUT = sys.argv[1], sys.argv[2], Path(sys.argv[3])
STEPS, ACCUMULATE = 30, 2


class Planned(Exception):
    """The program's own."""


def sizes():
    return torch.nn.Linear(8, 1), torch.utils.data.TensorDataset(torch.randn(STEPS * 8, 8))


class Faulty(frameworks.Logger):
    def log_metrics(self, metrics, step=None):
        if any(name.startswith("kilter/") for name in metrics):
            raise ConnectionError("the server of the logger is down")
        super().log_metrics(metrics, step)


def stepper(fail_at):
    """One optimizer step with its forward and backward."""
    model, data = sizes()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    done = [0]

    def step():
        done[0] += 1
        if done[0] == fail_at:
            raise Planned
        optimizer.zero_grad()
        model(data.tensors[0][:8]).pow(2).mean().backward()
        optimizer.step()

    return step


# Each: train with that logger, fail at that step (or never), the options go to the callback.


def fake_huggingface(logger, fail_at, options):
    trainer = frameworks.HuggingFaceTrainer(logger)
    trainer.add_callback(kilter.HuggingFaceCallback(trainer, **options))
    trainer.train(stepper(fail_at), STEPS, ACCUMULATE)


def fake_lightning(logger, fail_at, options):
    trainer = frameworks.LightningTrainer(logger, [kilter.LightningCallback(**options)])
    trainer.fit(stepper(fail_at), STEPS, ACCUMULATE)


def fake_accelerate(logger, fail_at, options):
    accelerator = frameworks.Accelerator(logger, ACCUMULATE)
    step = stepper(fail_at)
    with kilter.AccelerateCallback(accelerator, **options) as governing:
        for _ in range(STEPS * ACCUMULATE):
            with accelerator.accumulate():
                if accelerator.sync_gradients:
                    step()
                governing.step_end()
    accelerator.end_training()


def real_huggingface(logger, fail_at, options):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x=None, labels=None):
            y = self.layer(x)
            return {"loss": (y - labels).pow(2).mean(), "logits": y}

    class Rows(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logger.log_metrics(logs)

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == fail_at:
                raise Planned

    arguments = TrainingArguments(
        output_dir=str(OUT / "hf"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=ACCUMULATE,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(STEPS * 8)]
    trainer = Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[Rows()])
    trainer.add_callback(kilter.HuggingFaceCallback(trainer, **options))
    trainer.train()


def real_lightning(logger, fail_at, options):
    import lightning.pytorch as lightning
    from lightning.pytorch.loggers import CSVLogger

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, index):
            if self.global_step == fail_at:
                raise Planned
            return self.layer(batch[0]).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    class Rows(CSVLogger):
        def log_metrics(self, metrics, step=None):
            logger.log_metrics(metrics, step)

    _, data = sizes()
    lightning.Trainer(
        max_steps=STEPS,
        logger=Rows(str(OUT / "lightning")),
        accumulate_grad_batches=ACCUMULATE,
        callbacks=[kilter.LightningCallback(**options)],
        accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(Model(), torch.utils.data.DataLoader(data, batch_size=4))


def real_accelerate(logger, fail_at, options):
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    class Rows(GeneralTracker):
        name, requires_logging_directory, tracker = "rows", False, logger

        def __init__(self):
            super().__init__(_blank=True)

        def store_init_configuration(self, values):
            pass

        def log(self, values, step=None, **kwargs):
            logger.log_metrics(values, step)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, log_with=Rows())
    accelerator.init_trackers("test")
    model, data = sizes()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with kilter.AccelerateCallback(accelerator, **options) as governing:
        for done, (x,) in enumerate(loader):
            if done == fail_at:
                raise Planned
            with accelerator.accumulate(model):
                accelerator.backward(model(x).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
                governing.step_end()
    accelerator.end_training()


def main():
    if KIND == "fake":
        frameworks.install(NAME)
    train = globals()[f"{KIND}_{NAME}"]
    found = {}
    for case, logger, fail_at, options in (
        ("raises", frameworks.Logger(), 20, {"out": OUT / "raises"}),
        ("whole", frameworks.Logger(), None, {"out": OUT / "whole"}),
        ("logger", Faulty(), None, {"out": OUT / "logger"}),
        ("device", frameworks.Logger(), None, {"out": OUT / "device", "device": "sim:nothing"}),
        ("wrong", frameworks.Logger(), None, {"max_slowdown": 5.0}),
    ):
        raised = None
        # Until the search is over, where its outcome is looked at, however busy the machine is: of
        # one framework, since the others end their runs by the same code.
        searched = case == "whole" and NAME == "huggingface"
        session_options.REHEARSE_S = 600.0 if searched else 0.1
        try:
            train(logger, fail_at, {"device": "sim:v100", **options})
        except Exception as error:
            raised = type(error).__name__
        found[case] = {"raised": raised, "rows": logger.rows}
    print(json.dumps(found))


main()
