"""Lets the tests import the trainer's files the way the trainer itself does."""

from __future__ import annotations

import sys

from tests.native.example import TRAINER

sys.path.insert(0, str(TRAINER))
