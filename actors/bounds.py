"""Where numbers stop meaning anything: bounds that the merge actor and the trainer share."""

from __future__ import annotations

# Nats. A token that one policy finds e^20 times likelier than another was not sampled as recorded,
# or was recorded wrongly; its ratio counts as e^20, sends no gradient and overflows nothing.
MAX_LOG_RATIO = 20.0

# Of one turn or of a whole trajectory, shaped. Advantages are float32: far beyond this a single
# reward would leave its group's other members without a digit, or end as infinity.
MAX_REWARD = 1e9
