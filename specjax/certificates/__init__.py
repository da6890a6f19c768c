"""Certificates: proof by exact enumeration, on tiny models, that the shipped code is lossless."""

from specjax.certificates.certificate import certify
from specjax.certificates.comparison import Certificate
from specjax.certificates.enumerator import Branches, EnumeratingChoices, ReusedKeyError, branch_out

__all__ = ["Branches", "Certificate", "EnumeratingChoices", "ReusedKeyError", "branch_out", "certify"]
