"""Replicas of a model that is divided over workers."""
