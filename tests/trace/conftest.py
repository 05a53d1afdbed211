import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def zoo():
    """Small modules of many kinds, by name."""
    name = "loadmaster_trace_zoo"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("zoo.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
