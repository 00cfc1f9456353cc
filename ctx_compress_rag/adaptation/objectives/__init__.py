"""The losses that adaptation is trained with."""
