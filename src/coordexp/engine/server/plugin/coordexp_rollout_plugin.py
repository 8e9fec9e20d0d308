"""Plugin of ``swift rollout``: ``--external_plugins <this file>`` turns it into a rollout server for CoordExp.

ms-swift imports this file in its HTTP process and in every worker, before an engine starts. It needs coordexp installed
in ms-swift's own environment, and is switched on by environment variables of the server process:

    COORDEXP_ENABLE_VLLM_REPEAT_TERMINATE_INJECTION=1   guard answers against repetition
    COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON=<json>   the section rollout_matching.repeat_terminate, all of it
    COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH     or the path of a file that contains it
    COORDEXP_ENABLE_VLLM_CLOSED_NAMES=1                 requests may limit answers to a list of class names

The implementation is in :mod:`coordexp.engine.server.swift_rollout`. ``coordexp launch`` starts servers this way.
"""

from coordexp.engine.server.swift_rollout import install

install()
