"""What several routes take alike: who may read, short texts, and where a page starts and how long
it is.
"""

from typing import Annotated

from fastapi import Depends, Query

from api.http.security import needs
from api.settings import ApiKey
from api.storage.paging import MAX_PAGE

Reader = Annotated[ApiKey, Depends(needs("read"))]
Text = Annotated[str | None, Query(max_length=200)]
Cursor = Annotated[str | None, Query(max_length=400)]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE)]
