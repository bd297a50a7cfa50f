"""A run as a TensorBoard event file."""

# pyright: reportAttributeAccessIssue=false
# The classes of protocol buffers exist only at run time.

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from paceline.runs.exporters.run_export import RunExport


def write(run: RunExport, out: Path) -> None:
    """Write steps as `step/NAME`, final figures as `figure/NAME`, and the settings as text."""
    writer = EventFileWriter(str(out / run.name))
    last_step, end = 0, run.start_unix
    for step in run.rows():
        last_step, end = step.index, step.time_unix
        writer.add_event(_scalars("step", step.values, last_step, end))
    writer.add_event(_scalars("figure", run.figures, last_step, end))
    settings = json.dumps({"status": run.status, **run.settings}, indent=2)
    text = TensorProto(
        dtype=DT_STRING,
        string_val=[settings.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    value = Summary.Value(tag="settings/text_summary", tensor=text, metadata=metadata)
    writer.add_event(Event(wall_time=run.start_unix, step=0, summary=Summary(value=[value])))
    writer.close()


def _scalars(prefix: str, values: Mapping[str, float], step: int, wall_time: float) -> Event:
    members = [
        Summary.Value(tag=f"{prefix}/{name}", simple_value=value) for name, value in values.items()
    ]
    return Event(wall_time=wall_time, step=step, summary=Summary(value=members))
