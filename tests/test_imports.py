"""Test that garbage collection pauses while packages are imported, and continues as before."""

from __future__ import annotations

import gc

import pytest

from actors.imports import quick_imports


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_pauses_and_freezes_existing_objects(was_enabled: bool) -> None:
    if not was_enabled:
        gc.disable()
    try:
        gc.unfreeze()
        with pytest.raises(ImportError), quick_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == was_enabled and gc.get_freeze_count() > 1000
    finally:
        gc.enable()
