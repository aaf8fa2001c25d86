"""Interfaces of other libraries on top of the templates. Scripts for those libraries run with one changed import."""
