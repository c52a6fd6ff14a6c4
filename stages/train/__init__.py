"""Scored rows to updates of the policy."""
