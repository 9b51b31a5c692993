"""Every error zcomm raises: what came, what was expected, what to do.

    ZcommError
    ├── CodecError       a codec spelled wrong, a width or block it does not have        (ValueError)
    ├── BufferError      a tensor of the wrong size, dtype, device, layout or type       (TypeError, ValueError)
    ├── ReduceOpError    an operator a compressed sum cannot do                          (ValueError)
    ├── GroupError       a group this rank is not in, or none at all                     (ValueError, RuntimeError)
    ├── TopologyError    nodes and ranks that do not make up the group                   (ValueError)
    ├── PlanError        a setting of the Plan that makes no sense                       (ValueError)
    ├── KeywordError     a keyword that a call does not take                             (TypeError)
    ├── EngineError      no engine for this codec or device                              (RuntimeError)
    ├── TransportError   bytes that did not arrive                                       (RuntimeError)
    │   └── PeerTimeout  ... within the timeout; names collective, number, group, rank   (TimeoutError)
    ├── UnsupportedError what torch offers no place for, or zcomm does not do            (NotImplementedError)
    ├── MismatchError    ranks that called with different settings                       (RuntimeError)
    ├── MissingExtra     a package that an extra would have installed                    (ImportError)
    └── ClusterError     an emulated cluster that cannot be made as asked                (RuntimeError)

Each is also the builtin on the right, so code that knows nothing of zcomm catches it too.
"""

from __future__ import annotations


class ZcommError(Exception):
    """Root of all errors raised by zcomm itself."""


class CodecError(ZcommError, ValueError):
    """A codec that does not exist, or bytes that are not of that codec."""


class BufferError(ZcommError, TypeError, ValueError):
    """A tensor or array whose size, dtype, device, layout or type does not fit the call."""


class ReduceOpError(ZcommError, ValueError):
    """A reduction operator other than SUM, AVG and PREMUL_SUM."""


class GroupError(ZcommError, ValueError, RuntimeError):
    """A process group that is missing, not initialised, or that this rank does not belong to."""


class TopologyError(ZcommError, ValueError):
    """Nodes and ranks per node that do not make up the group."""


class PlanError(ZcommError, ValueError):
    """A setting of the Plan outside what it can be."""


class KeywordError(ZcommError, TypeError):
    """A keyword that a call does not take."""


class EngineError(ZcommError, RuntimeError):
    """No engine that can compute this codec on this device."""


class TransportError(ZcommError, RuntimeError):
    """Bytes could not be moved between ranks."""


class PeerTimeout(TransportError, TimeoutError):
    """A peer did not send or take its bytes within the timeout."""


class MismatchError(ZcommError, RuntimeError):
    """Ranks called the same collective with different settings."""


class UnsupportedError(ZcommError, NotImplementedError):
    """A form of training that a plug cannot serve."""


class MissingExtra(ZcommError, ImportError):
    """A package is missing that one of zcomm's extras installs."""


class ClusterError(ZcommError, RuntimeError):
    """An emulated cluster that cannot be made as asked."""
