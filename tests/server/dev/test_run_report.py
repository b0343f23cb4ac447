from __future__ import annotations

from pathlib import Path

from logitship.server.dev.run_report import shown_path, with_source_lines


def test_first_file_of_a_name_is_shown(tmp_path: Path) -> None:
    main, helper = tmp_path / "mine.py", tmp_path / "helpers" / "mine.py"
    helper.parent.mkdir()
    main.write_text("raise ValueError\n")
    helper.write_text("x = 1\n")
    text = with_source_lines('  File "mine.py", line 1, in <module>\nValueError', [main, helper])
    assert text == f'  File "{shown_path(main)}", line 1, in <module>\n    raise ValueError\nValueError'
