from coordexp.inference.detector import Detections as Detections
from coordexp.inference.detector import Detector as Detector

__version__: str
