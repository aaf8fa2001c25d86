"""Acceleration switches: ``ls`` of this folder is the catalogue. Imports no torch."""

from rapidformer_templates.switches._registry import REGISTRY, Registry, switch_options
from rapidformer_templates.switches._resolve import resolve

__all__ = ["REGISTRY", "Registry", "resolve", "switch_options"]
