"""``speculators train --max-steps N`` of release 0.9 where there is no accelerator, with its own arguments.

Its trainer moves all it holds to the accelerator of its rank and waits for that accelerator to time a step; here it
stays on the CPU and there is nothing to wait for. It ends with the epoch that holds the last step, skips validation,
and prints the tokens it read, its first and last loss and its checkpoint as JSON. On a CPU it needs ``--draft-attn-impl
eager --loss-implementation eager``; its bf16 is torch's autocast (``--hidden-states-dtype bfloat16``, its default).
"""

import json
import sys

import torch
from speculators.train import cli, trainer
from speculators.train.config import TrainConfig


class CpuTrainer(trainer.Trainer):
    """Theirs, told how many epochs its steps take, and to cast on the CPU, where it finds no accelerator."""

    def run_training(self) -> None:
        """Train; then say what was read."""
        sampler, left, epochs, tokens = self.train_loader.batch_sampler, self.config.max_steps, 0, 0
        while left > 0:
            batches = sampler._generate_batches(epochs)[:left]
            tokens += sum(int(sampler.lengths[batch].sum()) for batch in batches)
            left, epochs = left - len(batches), epochs + 1
        self.config, self.val_loader, self.device_type = self.config._replace(num_epochs=epochs), None, "cpu"
        losses: list[float] = []
        self.model.register_forward_hook(lambda _model, _read, out: losses.append(float(out[1].detach())))
        super().run_training()
        facts = {"tokens": tokens, "first_loss": losses[0], "last_loss": losses[-1]}
        print(json.dumps({**facts, "checkpoint": str(self.checkpointer.path / str(epochs - 1))}))


def main() -> None:
    """Train as the arguments say."""
    trainer.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None
    cli.Trainer = CpuTrainer
    cli.main(TrainConfig.resolve(sys.argv[1:]))


if __name__ == "__main__":
    main()
