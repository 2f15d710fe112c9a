"""Texts name options as their reader types them, whatever user text they contain."""

from __future__ import annotations

import pickle

import pytest

import virnucpro
from virnucpro.core.errors import InputMissingError, UsageError
from virnucpro.core.events import ErrorText
from virnucpro.core.option_schema import build_options
from virnucpro.core.option_text import OptionText, join_texts, with_options
from virnucpro.workflows.predict_options import PredictOptions

FLAGS = {"resume", "force", "regions"}


@pytest.mark.parametrize(
    ("template", "values", "typed", "called"),
    [
        ("add {resume}", {}, "add --resume", "add resume=True"),
        ("with {regions:no}", {}, "with --no-regions", "with regions=False"),
        ("another {output_dir}", {}, "another --output-dir", "another output_dir"),
        ("{device:cpu}", {}, "--device cpu", "device='cpu'"),
        ("{threshold:0.9}", {}, "--threshold 0.9", "threshold=0.9"),
        ("{gpus:{asked}}: no", {"asked": "7"}, "--gpus 7: no", "gpus=7: no"),
        ("{min_length} is {n}", {"n": -1}, "--min-length is -1", "min_length is -1"),
        ("{path} exists", {"path": "--force"}, "--force exists", "--force exists"),
        ("{path} exists", {"path": "{force}"}, "{force} exists", "{force} exists"),
        ("{device:{kind}}", {"kind": "{force}"}, "--device {force}", "device='{force}'"),
        ("`a {{b}}`", {}, "`a {b}`", "`a {b}`"),
        ("", {}, "", ""),
    ],
)
def test_text_has_two_forms(template, values, typed, called):
    text = with_options(template, **values)
    assert (text, text.in_python(FLAGS)) == (typed, called)
    again = pickle.loads(pickle.dumps(text))  # noqa: S301 - our own
    assert (again, again.in_python(FLAGS), again.names) == (typed, called, text.names)


def test_texts_are_joined_with_their_options():
    inner = with_options("add {resume}")
    both = join_texts("; ", [inner, "or wait", with_options("use {force}")])
    assert both == "add --resume; or wait; use --force"
    assert both.in_python(FLAGS) == "add resume=True; or wait; use force=True"
    outer = with_options("{inner} in {folder}", inner=inner, folder="a/--resume")
    assert outer.in_python(FLAGS) == "add resume=True in a/--resume"


def test_error_names_its_option():
    with pytest.raises(UsageError) as caught:
        build_options(PredictOptions, {"input": "i", "output_dir": "o", "min_length": -1})
    assert (caught.value.option, str(caught.value)) == ("min_length", "--min-length is -1")
    with pytest.raises(virnucpro.VirnucproError) as caught:
        virnucpro.predict("ACGT", min_length=-1)
    assert (caught.value.option, str(caught.value)) == ("min_length", "min_length is -1")
    assert type(caught.value.args[0]) is str


def test_refused_option_is_named_alone():
    with pytest.raises(virnucpro.VirnucproError) as caught:
        virnucpro.predict("ACGT", add=True)
    assert str(caught.value) == "add: no effect without resume=True, which continues the run"
    assert (caught.value.hint, caught.value.option) == ("leave out add", "add")


def test_path_that_looks_like_an_option_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputMissingError) as caught:
        virnucpro.predict(input="--force.fa")
    assert str(caught.value).startswith("--force.fa: No such file")


def test_error_of_a_helper_keeps_its_options():
    error = UsageError(with_options("{force} is wrong"), with_options("{resume}"), option="force")
    sent = pickle.loads(pickle.dumps(ErrorText.from_error(error))).to_error  # noqa: S301 - our own
    assert (type(sent), sent.option) == (UsageError, "force")
    assert isinstance(sent.message, OptionText) and isinstance(sent.hint, OptionText)
    assert (str(sent), sent.hint) == ("--force is wrong", "--resume")
