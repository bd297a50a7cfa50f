"""One run as one archive: written, checked elsewhere, taken in, and repeated."""
