"""The ModelSource of production: a checkpoint directory, through the model room."""

from __future__ import annotations
