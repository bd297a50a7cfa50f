"""Turn published rows into audit lines: cells, inputs, and how FLOPs are counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from paceline.audit.crosscheck import AuditLine
from paceline.audit.derivation import (
    PER_DEVICE,
    AlternativeInputs,
    Cell,
    Inputs,
    judge,
    relation,
    speed_of,
)
from paceline.core.errors import UserError
from paceline.core.flops import (
    CONVENTIONS,
    FlopsInput,
    attention_per_token,
    flops_per_sample,
    model_flops_per_token,
    with_recompute,
    without_recompute,
)
from paceline.core.printed import Interval, exactly, read_printed
from paceline.core.recompute import block_levels
from paceline.core.shape import (
    LoraSpec,
    LoraTarget,
    Shape,
    linear_sizes,
    matrices_per_token,
    num_parameters,
)
from paceline.core.units import count, pluralize
from paceline.files import catalog
from paceline.files.recipe import load_recipe
from paceline.files.references import UNIT_SIZES, Row

ATTENTION: tuple[LoraTarget, ...] = ("q", "k", "v", "o")
MLP: tuple[LoraTarget, ...] = ("up", "gate", "down")


def audit_lines(rows: Sequence[Row]) -> list[AuditLine]:
    """Return the audit lines of the rows of one source, which may refer to each other."""
    by_id = {row.id: row for row in rows}
    return [_line(row, rows, by_id) for row in rows]


def printed_cells(row: Row) -> dict[str, Cell]:
    """Return the printed numbers of a row by column, in base units."""
    cells: dict[str, Cell] = {}
    for column, text in row.printed.items():
        printed = read_printed(text, row.resolution.get(column))
        if printed is not None and column != "ranks":
            cells[column] = Cell(column, printed, UNIT_SIZES.get(row.units[column], 1.0))
    return cells


def flops_input(row: Row) -> FlopsInput | None:
    """Return the inputs of a FLOPs convention; None without a shape or a sequence length.

    A convention that counts recomputation implies full checkpointing if the row gives none.
    """
    shape, lora = _model(row)
    if shape is None or row.seq_len is None:
        return None
    states_recompute = "recompute" in row.layout.model_fields_set
    counts_recompute = row.convention is not None and row.convention not in CONVENTIONS
    recompute = "full" if counts_recompute and not states_recompute else row.layout.recompute
    levels = block_levels(shape, row.layout)
    nominal = row.nominal_parameters
    return FlopsInput(shape, row.seq_len, recompute, lora, nominal, levels=levels)


def _line(row: Row, rows: Sequence[Row], by_id: Mapping[str, Row]) -> AuditLine:
    twin_row = by_id.get(row.repeats or "")
    twin = _line(twin_row, rows, {}) if twin_row else None
    cells = printed_cells(row)
    speedup_row = row if "speedup" in cells or twin_row is None else twin_row
    inputs = _with_base(row_inputs(row), _base(row, rows, row.base_num_devices))
    efficiency = _efficiency_of_speedup(speedup_row)
    if efficiency:
        inputs = _with_setting(inputs, "scaling_efficiency", efficiency)
    options = AlternativeInputs(_peaks(row), _flops(row), dict(_other_bases(row, rows, inputs)))
    return AuditLine(row.id, row.table, cells, inputs, options, twin)


def _model(row: Row) -> tuple[Shape | None, LoraSpec | None]:
    """Return shape and adapters of the row's recipe, or its own shape with its active experts."""
    if row.recipe:
        recipe = _recipe(row.recipe)
        return recipe.model, recipe.lora
    if row.shape and row.experts_per_token:
        active = row.shape.ffn_size * row.experts_per_token
        return row.shape.model_copy(update={"ffn_size": active}), None
    return row.shape, None


_recipe = cache(load_recipe)


def row_inputs(row: Row) -> Inputs:
    """Return the inputs of the row's figures, without those that other rows give."""
    printed_columns = set(row.printed)
    no_total = not printed_columns - PER_DEVICE - {"memory_bytes"}
    # With tokens/s and FLOP/s alone, the batch cancels out. Per device, the devices do as well.
    batch = row.global_batch or (None if "step_time_s" in printed_columns else 1)
    return Inputs(
        seq_len=row.seq_len,
        global_batch=batch,
        num_devices=row.num_devices or (1 if no_total else None),
        flops_per_sample=_flops_per_sample(row),
        peak_flops_per_s=row.peak_flops_per_s,
        total_tokens=row.total_tokens,
        timed_steps=row.figure("timed_steps"),
        settings={name: exactly(value) for name, value in _settings(row)},
    )


def _flops_per_sample(row: Row) -> Interval | None:
    if row.flops_per_sample:
        return exactly(row.flops_per_sample)
    x = flops_input(row)
    if x is None or row.convention is None:
        return None
    flops = flops_per_sample(row.convention, x)
    step = row.resolution.get("nominal_parameters", 0.0)
    if x.nominal_parameters and step and _counts_parameters(row.convention):
        half = flops * step / x.nominal_parameters / 2
        return Interval(flops - half, flops + half)
    return exactly(flops)


def _counts_parameters(convention: str | None) -> bool:
    return convention is not None and without_recompute(convention) == "six-n"


def _settings(row: Row) -> Iterator[tuple[str, float]]:
    """Yield columns that follow from the row's settings alone."""
    layout, devices, batch = row.layout, row.num_devices, row.global_batch
    if devices:
        yield "dp", layout.dp(devices)
    if devices and batch and devices >= layout.model_devices:
        yield "num_microbatches", layout.num_microbatches(devices, batch)
    if batch and row.devices_per_node:
        # Every replica holds exactly one micro-batch of the global batch.
        yield "nodes", batch / layout.micro_batch * layout.model_devices / row.devices_per_node
    if row.seq_len:
        yield "seq_len", row.seq_len
    x = flops_input(row)
    if x:
        if x.shape.kind == "decoder":
            yield "attention_flops_per_token", _matrices(x, ATTENTION) + attention_per_token(x)
            yield "mlp_flops_per_token", _matrices(x, MLP)
            yield "head_flops_per_token", 6.0 * x.shape.padded_vocab() * x.shape.embed_dim
        if row.convention:
            yield "flops_per_sample", x.seq_len * model_flops_per_token(row.convention, x)


def _matrices(x: FlopsInput, targets: Sequence[LoraTarget]) -> float:
    sizes = linear_sizes(x.shape)
    weights = sum(
        sizes[t][0] * sizes[t][1] * matrices_per_token(x.shape, t) for t in targets if t in sizes
    )
    return 6.0 * x.shape.num_layers * weights


def _efficiency_of_speedup(row: Row) -> Interval | None:
    """Return scaling efficiency from a printed speed-up over one device."""
    cell = printed_cells(row).get("speedup")
    if cell is None or not row.num_devices or (row.base_num_devices or 1) != 1:
        return None
    return cell.rounding_interval().times(1 / row.num_devices)


def _with_setting(inputs: Inputs, name: str, value: Interval) -> Inputs:
    return replace(inputs, settings={**inputs.settings, name: value})


def _base(row: Row, rows: Sequence[Row], num_devices: int | None) -> Row | None:
    """Return the row with `num_devices` devices to which this row's speed-up refers."""
    table = next((r.table for r in rows if r.id == row.repeats), row.table)
    bases = (r for r in rows if r.table == table and r.num_devices == num_devices)
    return next(bases, None) if num_devices else None


def _with_base(inputs: Inputs, base: Row | None) -> Inputs:
    speed = speed_of(printed_cells(base), row_inputs(base)) if base else None
    if base is None or speed is None or base.global_batch is None:
        return inputs
    times = speed[1].interval
    rate = Interval(base.global_batch / times.high, base.global_batch / times.low)
    return replace(inputs, base_num_devices=base.num_devices, base_samples_per_s=rate)


def _other_bases(row: Row, rows: Sequence[Row], inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    if not {"speedup", "scaling_efficiency"} & set(row.printed):
        return
    settings = {k: v for k, v in inputs.settings.items() if k != "scaling_efficiency"}
    for num in sorted({r.num_devices for r in rows if r.num_devices}):
        base = _base(row, rows, num)
        if base and num not in (row.base_num_devices, row.num_devices):
            words = (
                f"is true against {base.id}, "
                f"{pluralize(num, 'device')}, not against {row.base_num_devices}"
            )
            yield words, _with_base(replace(inputs, settings=settings), base)


def _peaks(row: Row) -> dict[str, float]:
    """Return peaks the source may have used: dense, then sparse, of every dtype of the device."""
    if not row.device or not row.peak_flops_per_s:
        return {}
    try:
        device = catalog.device(row.device)
    except UserError:
        return {}
    own_first = sorted(device.peaks.items(), key=lambda item: item[0] != row.dtype)
    names: dict[float, str] = {}
    for dtype, peak in own_first:
        dense = peak.flops_per_s
        half = f", half of the sparse {2 * dense / 1e12:.10g}" if dense % 1e12 else ""
        names.setdefault(dense, f"the {dtype} peak of {device.name}{half}")
    for dtype, peak in own_first:
        dense = peak.flops_per_s
        names.setdefault(2 * dense, f"the sparse {dtype} peak of {device.name}")
        whole = dense // 1e12 * 1e12
        names.setdefault(whole, f"the {dtype} peak of {device.name} in whole TFLOP/s")
    return {words: peak for peak, words in names.items()}


def _flops(row: Row) -> dict[str, float]:
    """Return FLOPs per sequence under every alternative count, keyed by its description."""
    x = flops_input(row)
    if x is None:
        return {}
    counts: dict[str, float] = {}
    for name, convention in CONVENTIONS.items():
        counts[f"the convention {name}"] = flops_per_sample(name, x)
        if convention.printed_with_recompute:
            recomputed_name = with_recompute(name)
            counts[f"the convention {recomputed_name}"] = flops_per_sample(
                recomputed_name, replace(x, recompute="full")
            )
    if x.nominal_parameters:
        num_text = count(num_parameters(x.shape), 4)
        nominal = row.convention if _counts_parameters(row.convention) else None
        counts[f"the counted {num_text} parameters"] = flops_per_sample(
            nominal or "six-n", replace(x, nominal_parameters=None)
        )
    return counts


MIN_ROWS = 3
MIN_SHARE = 2 / 3
FLOPS_COLUMNS = ("flops_per_s_per_device", "mfu")


@dataclass(frozen=True)
class Assumption:
    """Probable way to count FLOPs for one model of a table, and how many rows it explains."""

    table: str
    model: str
    words: str
    num_given: int
    num_rows: int

    def __str__(self) -> str:
        return (
            f"{self.table}: {self.model} is assumed to use {self.words}, which explains "
            f"{self.num_given:,} of {pluralize(self.num_rows, 'row')}"
        )


def assume(rows: Sequence[Row], gate_is_open: bool) -> tuple[list[Row], list[Assumption]]:
    """Fill in the convention, peak and gate that fit best where they are not declared.

    All rows of a model in a table share one choice. It must explain at least three rows and two
    thirds of them; otherwise their FLOPs stay unknown. If only the peak is undeclared, the data
    sheet's peak is used regardless of how many rows it explains.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.source, row.table, row.model or row.recipe or ""), []).append(row)
    changed_rows: dict[str, Row] = {}
    assumptions: list[Assumption] = []
    for (_, table, model), members in groups.items():
        rows_with_flops = [row for row in members if set(FLOPS_COLUMNS) & set(row.printed)]
        best = (
            _best(rows_with_flops, gate_is_open and not rows_with_flops[0].recipe)
            if rows_with_flops
            else None
        )
        if best:
            counting, num_given, words = best
            changed_rows |= {row.id: _with(row, counting) for row in members}
            assumptions.append(
                Assumption(table, model or "its model", words, num_given, len(rows_with_flops))
            )
        elif gate_is_open:
            changed_rows |= {row.id: row.model_copy(update={"shape": None}) for row in members}
    return [changed_rows.get(row.id, row) for row in rows], assumptions


Counting = dict[str, Any]


def _best(rows: Sequence[Row], gate_is_open: bool) -> tuple[Counting, int, str] | None:
    """Return the count that explains most rows, their number, and its description.

    Return None if everything is declared.
    """
    first = rows[0]
    if flops_input(first) is None and not first.flops_per_sample:
        return None
    if not gate_is_open and first.convention and not _peak_is_open(rows):
        return None
    best: tuple[Counting, int] | None = None
    for counting in _countings(first, gate_is_open, _peak_is_open(rows)):
        num_given = sum(_gives(_with(row, counting)) for row in rows)
        if best is None or num_given > best[1]:
            best = counting, num_given
        if num_given == len(rows):
            break
    is_declared = bool(first.convention) and not gate_is_open and _some_peak_is_known(rows)
    if best is None or not (is_declared or best[1] >= max(MIN_ROWS, MIN_SHARE * len(rows))):
        return None
    return best[0], best[1], _description(best[0])


def _some_peak_is_known(rows: Sequence[Row]) -> bool:
    return any("mfu" in row.printed and _peak(row, False) for row in rows)


def _peak_is_open(rows: Sequence[Row]) -> bool:
    return any("mfu" in row.printed and row.peak_flops_per_s is None for row in rows)


def _countings(row: Row, gate_is_open: bool, peak_is_open: bool) -> Iterator[Counting]:
    """Yield every way to count that the table does not rule out, the common ones first."""
    states_recompute = "recompute" in row.layout.model_fields_set
    plain = states_recompute and row.layout.recompute == "none"
    open_fields = {
        "padded": (False, True) if row.shape else (False,),
        "convention": [row.convention] if row.convention else list(_conventions(plain)),
        "gated": (False, True) if gate_is_open else (None,),
        "digits": (None,) if row.flops_per_sample else (None, 3),
        "whole_peak": (False, True) if peak_is_open else (None,),
    }
    for values in product(*open_fields.values()):
        yield dict(zip(open_fields, values, strict=True))


def _conventions(plain: bool) -> Iterator[str]:
    """Yield names of conventions; `plain` excludes those that count recomputation."""
    for name, convention in CONVENTIONS.items():
        yield name
        if convention.printed_with_recompute and not plain:
            yield with_recompute(name)


def _with(row: Row, counting: Counting) -> Row:
    """Return the row with one way of counting FLOPs."""
    update: Counting = {"convention": counting["convention"]}
    if row.shape:
        gated_ffn = row.shape.gated_ffn if counting["gated"] is None else counting["gated"]
        vocab = _padded(row) if counting["padded"] else row.shape.vocab_size
        update["shape"] = row.shape.model_copy(update={"gated_ffn": gated_ffn, "vocab_size": vocab})
    if row.peak_flops_per_s is None and counting["whole_peak"] is not None:
        update["peak_flops_per_s"] = _peak(row, counting["whole_peak"])
    changed_row = row.model_copy(update=update)
    x = flops_input(changed_row)
    if x and counting["digits"] and row.flops_per_sample is None:
        rounded_flops = float(
            f"{flops_per_sample(counting['convention'], x):.{counting['digits'] - 1}e}"
        )
        changed_row = changed_row.model_copy(update={"flops_per_sample": rounded_flops})
    return changed_row


def _padded(row: Row) -> int:
    """Return the vocabulary as Megatron pads it, to a multiple of 128 x tp."""
    assert row.shape
    padding = row.shape.model_copy(update={"vocab_multiple": 128})
    return padding.padded_vocab(row.layout.tp)


def _peak(row: Row, whole: bool) -> float | None:
    """Return the dense peak of the row's device and dtype, or that peak in whole TFLOP/s."""
    if row.device is None or row.dtype is None:
        return None
    peak = catalog.device(row.device).peak_flops_per_s(row.dtype)
    return peak // 1e12 * 1e12 if peak and whole else peak


def _gives(row: Row) -> bool:
    """Return whether all cells of the row that depend on FLOPs follow."""
    cells, inputs = printed_cells(row), row_inputs(row)
    speed = speed_of(cells, inputs)
    flops_columns = [column for column in FLOPS_COLUMNS if column in cells]
    for column in flops_columns:
        how = relation(column, inputs)
        if speed is None or column == speed[0] or how is None:
            return False
        if judge(cells[column], how, speed[1]) == "fails":
            return False
    return bool(flops_columns)


def _description(counting: Counting) -> str:
    words = [str(counting["convention"])]
    if counting["gated"] is not None:
        words.append(
            "gated feed-forward layers"
            if counting["gated"]
            else "feed-forward layers without a gate"
        )
    if counting["digits"]:
        words.append("FLOPs of a sequence in three digits")
    if counting["whole_peak"] is not None:
        whole = " in whole TFLOP/s" if counting["whole_peak"] else ""
        words.append(f"the dense peak of the data sheet{whole}")
    if counting["padded"]:
        words.append("the vocabulary padded to 128 x tp")
    return ", ".join(words)
