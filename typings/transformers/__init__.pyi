# What this project uses of transformers' top module, from where it is defined. Type checkers spent a third of their
# time on what else that module imports: every model. Add a name here if it is an "unknown import symbol".

from typing import Any

from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.generation.logits_process import LogitsProcessor as LogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList as LogitsProcessorList
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor as RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import TemperatureLogitsWarper as TemperatureLogitsWarper
from transformers.generation.logits_process import TopKLogitsWarper as TopKLogitsWarper
from transformers.generation.logits_process import TopPLogitsWarper as TopPLogitsWarper
from transformers.generation.utils import GenerationMixin as GenerationMixin
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.processing_auto import AutoProcessor as AutoProcessor
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.bert.configuration_bert import BertConfig as BertConfig
from transformers.models.bert.modeling_bert import BertModel as BertModel
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Qwen2VLImageProcessor
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig as Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLForConditionalGeneration as Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor as Qwen3VLVideoProcessor
from transformers.optimization import get_scheduler as get_scheduler
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.trainer import Trainer as Trainer
from transformers.trainer_callback import EarlyStoppingCallback as EarlyStoppingCallback
from transformers.trainer_callback import TrainerCallback as TrainerCallback
from transformers.trainer_callback import TrainerControl as TrainerControl
from transformers.trainer_callback import TrainerState as TrainerState
from transformers.trainer_utils import enable_full_determinism as enable_full_determinism
from transformers.trainer_utils import set_seed as set_seed
from transformers.training_args import TrainingArguments as TrainingArguments

__version__: str
trainer: Any
utils: Any
