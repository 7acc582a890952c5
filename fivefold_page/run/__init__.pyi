from fivefold_page.run import compare as compare
from fivefold_page.run import view as view
from fivefold_page.run.compare import RunSource as RunSource
