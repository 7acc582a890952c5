from fivefold_page.learn import chapters as chapters
from fivefold_page.learn.glossary import GLOSSARY as GLOSSARY
from fivefold_page.learn.lesson import Choice as Choice
from fivefold_page.learn.lessons import LESSONS as LESSONS
