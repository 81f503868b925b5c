"""Where the grammar process cannot be started."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from runtime.grammar.manager import GrammarManager
from server.process.exclusive_files import MAX_DIRECTORY_BYTES
from tests.support.engine.grammar_engine import Texts, ask, json_grammar, make_engine, run
from tests.support.server.fake_engine import VOCAB


def test_where_there_can_be_no_process_its_request_ends_and_others_run_on(
    texts: Texts, tmp_path: Path
) -> None:
    grammars = GrammarManager(texts.file, VOCAB, folder=tmp_path / "swept away")
    engine = make_engine(grammars, overlap=True)
    outputs = run(engine, [ask(1, json_grammar({"type": "boolean"})), ask(2, "")])
    assert (
        "cannot be started" in (outputs[1][-1].error or "") and not outputs[1][-1].is_request_error
    )
    assert outputs[2][-1].finish in ("stop", "length")


def test_a_process_that_cannot_be_started_leaves_no_folder_behind(
    texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more_processes(*arguments: object, **options: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr("runtime.grammar.manager.subprocess.Popen", no_more_processes)
    grammars = GrammarManager(texts.file, VOCAB, folder=tmp_path)
    for id in (1, 2):
        grammars.submit(ask(id, json_grammar({"type": "boolean"})))
    assert [bool(error) for _, error, _ in grammars.take_compiled()] == [True, True]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("longest", [True, False])
def test_sockets_fit_into_the_longest_directory_that_the_launcher_takes(
    texts: Texts, longest: bool
) -> None:
    letters = MAX_DIRECTORY_BYTES - len("/tmp/12345678") + (not longest)
    folder = Path(tempfile.mkdtemp(prefix="w" * letters, dir="/tmp"))
    grammars = GrammarManager(texts.file, VOCAB, folder=folder)
    try:
        grammars.submit(ask(1, json_grammar({"type": "boolean"})))
        assert (grammars._process is not None) == longest
    finally:
        grammars.close()
        shutil.rmtree(folder)
