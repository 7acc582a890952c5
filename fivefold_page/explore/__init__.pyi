from fivefold_page.explore import explore as explore
from fivefold_page.explore.state import ALONE as ALONE
from fivefold_page.explore.state import JOB as JOB
from fivefold_page.explore.state import State as State
from fivefold_page.explore.state import state_of as state_of
