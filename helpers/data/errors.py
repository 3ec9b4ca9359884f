"""What can go wrong with data, told so that a reader can mend it."""


class DataError(RuntimeError):
    """Data is missing, damaged or cannot be fetched; the message says what to do."""
