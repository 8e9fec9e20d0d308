from coordexp.api import Run as Run
from coordexp.api import complete as complete
from coordexp.api import convert as convert
from coordexp.api import evaluate as evaluate
from coordexp.api import tile as tile
from coordexp.api import train as train
from coordexp.inference.completion import CompletionRules as CompletionRules
from coordexp.inference.detections import Detections as Detections
from coordexp.inference.detector import Detector as Detector
from coordexp.inference.parse_answer import parse_answer as parse_answer

__version__: str
