"""Plans name the sequence length, the batch and the trainer of their job; unknown of older ones

Revision: 0004, after 0003.
"""

import sqlalchemy as sa

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

COLUMNS = {"seq_len": sa.BigInteger(), "global_batch_size": sa.BigInteger(), "trainer": sa.Text()}


def upgrade() -> None:
    for name, kind in COLUMNS.items():
        op.add_column("plans", sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    for name in reversed(COLUMNS):
        op.drop_column("plans", name)
