"""What a model's attention looks at: weights, key mass, log-sum-exp, entropy and the largest weights."""

from ._record import record
from ._recording import Recording, Top, load

__all__ = ["Recording", "Top", "load", "record"]
