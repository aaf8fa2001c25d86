"""Update rules that torch does not bring, and those of other packages in the form that checkpoints can keep."""
