"""Collection stands still while packages are imported, and goes on as it was."""

from __future__ import annotations

import gc

import pytest

from actors.imports import quick_imports


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collection_pauses_and_visits_nothing_of_what_is_there(was_enabled: bool) -> None:
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
