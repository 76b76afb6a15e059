"""`fxpipe check`."""

from tests.cli.run import fxpipe_json


def test_the_runs_are_listed_with_their_results() -> None:
    found = fxpipe_json("check", "gpt", "--stages", "2", "--quick")

    assert found["equal"] is True
    assert [row["result"] for row in found["runs"]] == ["equal"] * 5
    assert found["runs"][0]["run"] == "the example"
    assert found["runs"][-1]["run"].startswith("a second call")
