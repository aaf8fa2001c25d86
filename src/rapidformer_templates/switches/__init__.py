"""Accelerations: ``ls`` of this folder is the catalogue. One folder or file each; declarations import no torch."""
