"""Every accepted pair with fp8 follows one process that rounds the same micro batches to fp8."""

from typing import Any

import pytest

from tests.support import covering
from tests.support.combinations import FP8
from tests.switches.test_pairs import check_row

pytest.importorskip("torchao.float8", reason="needs torchao: pip install 'rapidformer_templates[torchao]'")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("row", [row for row in covering.table()["rows"] if FP8 in row], ids=" + ".join)
def test_rows_that_cover_all_pairs_with_fp8_follow_one_process(row: list[str], record_property: Any) -> None:
    check_row(row, record_property)
