"""The errors by which Ray reports that an actor has died for good."""

from ray.exceptions import ActorDiedError, OutOfMemoryError

ACTOR_DEATHS = (ActorDiedError, OutOfMemoryError)
"""What a call to a dead actor raises: the second if Ray's memory monitor ended its process.

An actor that Ray restarts raises ActorUnavailableError in both cases.
"""
