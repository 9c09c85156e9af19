"""Reads the folder of a run back, and what else the tests of the scripts share."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent


def read_events(folder):
    """Scalars {tag: [(step, value), ...]} and the text of `hyperparameters`, "" if it has none."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}
    text = [tag for tag in tags["tensors"] if tag.startswith("hyperparameters")]
    tensors = [e.tensor_proto for tag in text for e in events.Tensors(tag)]
    return scalars, tensors[-1].string_val[0].decode() if tensors else ""
