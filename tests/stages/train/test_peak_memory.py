from align.stages.train import throughput


def test_the_peak_is_known_on_a_system_that_hides_its_processes(tmp_path, monkeypatch):
    seen = throughput.peak_mib()
    monkeypatch.setattr(throughput, "STATUS", tmp_path / "not" / "there")
    assert throughput.peak_mib() >= 0.5 * seen > 0
