"""Patching whole models: what can be fused (audit), doing it (patch) and undoing it (revert)."""

from __future__ import annotations

from flashnorm_triton.models.auditor import audit
from flashnorm_triton.models.patcher import PatchHandle, patch, patched
from flashnorm_triton.models.report import AuditReport, SiteReport

__all__ = ["AuditReport", "PatchHandle", "SiteReport", "audit", "patch", "patched"]
