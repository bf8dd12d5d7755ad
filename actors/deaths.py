"""The errors by which Ray reports that an actor has died for good."""

from ray.exceptions import ActorDiedError, OutOfMemoryError

ACTOR_DEATHS = (ActorDiedError, OutOfMemoryError)
"""The errors that a call to a dead actor raises. Ray raises OutOfMemoryError if its memory monitor
ended the actor's process.

An actor that Ray restarts raises ActorUnavailableError in both cases.
"""
