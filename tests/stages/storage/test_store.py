"""A disk and a bucket keep to what caches, tables and answers rely on."""

from support.store_contract import require_store_contract


def test_they_keep_to_the_contract(tmp_path, bucket):
    drafts, disk = tmp_path / "drafts", tmp_path / "disk"
    for folder in (drafts, disk):
        folder.mkdir()
    for root in (disk, bucket):
        require_store_contract(root, drafts)
