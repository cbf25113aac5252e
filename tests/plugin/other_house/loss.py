"""Half of KL."""

from trainer.losses.kinds import LossKind, Slopes

HALF_KL = LossKind(lambda c: Slopes((c.cross - c.entropy) / 2, by_cross=0.5), entropy=True)
