from fivefold_page import document as document
from fivefold_page import server as server
from fivefold_page import timeline as timeline
from fivefold_page.view import Params as Params
from fivefold_page.view import Progress as Progress
from fivefold_page.view import View as View
