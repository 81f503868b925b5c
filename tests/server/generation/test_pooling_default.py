"""The default pooling of a model, which a request and --pooling override."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.generation.pooling_default import pooling_of, read_default


def write(folder: Path, modules: str | None, config: str | None, place: str = "1_Pooling") -> str:
    if modules is not None:
        (folder / "modules.json").write_text(modules)
    if config is not None:
        (folder / place).mkdir()
        (folder / place / "config.json").write_text(config)
    return str(folder)


MODULES = (
    '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},'
    ' {"idx": 1, "name": "1", "path": "PLACE", "type": "sentence_transformers.models.Pooling"},'
    ' {"idx": 2, "name": "2", "path": "2_N", "type": "sentence_transformers.models.Normalize"}]'
)
LAST = '{"word_embedding_dimension": 8, "pooling_mode_lasttoken": true, "include_prompt": true}'
MEAN = '{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}'


@pytest.mark.parametrize(
    ("modules", "config", "place", "kind"),
    [
        (None, None, "", "last"),
        (None, LAST, "1_Pooling", "last"),
        (None, MEAN, "1_Pooling", "mean"),
        (MODULES.replace("PLACE", "1_Pooling"), MEAN, "1_Pooling", "mean"),
        (MODULES.replace("PLACE", "7_P"), MEAN, "7_P", "mean"),
        (MODULES.replace("PLACE", "1_Pooling"), None, "", "last"),
        (None, '{"pooling_mode": "mean"}', "1_Pooling", "mean"),
        (None, '{"pooling_mode": "lasttoken"}', "1_Pooling", "last"),
    ],
)
def test_the_models_files_name_the_pooling(
    tmp_path: Path, modules: str | None, config: str | None, place: str, kind: str
):
    assert read_default(write(tmp_path, modules, config, place)) == (kind, "")


@pytest.mark.parametrize(
    ("modules", "config", "words"),
    [
        (None, '{"pooling_mode_cls_token": true}', "pooling_mode_cls_token"),
        (None, '{"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": true}', " and "),
        (None, "{}", "not named"),
        (None, "{", "config.json"),
        ("[1]", None, "modules.json"),
        (MODULES.replace("Normalize", "Dense"), MEAN, "a module Dense"),
    ],
)
def test_an_unsupported_default_pooling_is_an_error_unless_another_is_chosen(
    tmp_path: Path, modules: str | None, config: str | None, words: str
):
    folder = write(tmp_path, modules, config)
    with pytest.raises(Exception, match="--pooling") as caught:
        pooling_of(folder, "auto", None)
    assert words in str(caught.value)
    assert pooling_of(folder, "auto", "mean") == "mean"
    assert pooling_of(folder, "last", None) == "last"


def test_the_operators_choice_beats_the_models_and_the_callers_beats_both(tmp_path: Path):
    folder = write(tmp_path, None, MEAN)
    assert pooling_of(folder, "auto", None) == "mean"
    assert pooling_of(folder, "last", None) == "last"
    assert pooling_of(folder, "last", "mean") == "mean"
