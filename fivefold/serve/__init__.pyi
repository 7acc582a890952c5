from fivefold.serve import server as server
