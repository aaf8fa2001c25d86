"""From flags to a plan, or to every reason why not. Imports no torch."""
