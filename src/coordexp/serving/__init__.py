"""The programs beside a learner: ``serve`` (``coordexp serve``), ``launch`` (``coordexp launch``) and ``plugin`` (for
``swift rollout``)."""
